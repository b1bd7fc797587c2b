"""Other projects' files that the router serves at / and /docs, and where they come from."""
