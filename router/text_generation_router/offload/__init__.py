"""Child processes, which can be killed, for work that would block the event loop or may never end."""
