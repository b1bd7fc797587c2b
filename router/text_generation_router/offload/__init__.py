"""Child processes for work that would block the event loop or may never end. A child can be killed."""
