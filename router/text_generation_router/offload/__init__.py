"""Work that would hold the event loop, or that may never end, done in child processes that can be killed."""
