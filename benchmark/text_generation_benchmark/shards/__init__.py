"""TGI's benchmark of the shards alone: steps straight to their sockets, past the router."""
