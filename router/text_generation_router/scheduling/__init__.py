"""Which tokens are computed next, and where they lie. Pure: no I/O, no clock, no torch; imports nothing of ours."""
