"""The servers and libraries that are measured beside this one, and how they are installed."""
