"""Equal shares of owners and their tenants: of threads and child processes, and of the turns of the event loop."""
