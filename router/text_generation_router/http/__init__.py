"""HTTP apart from the routes: connections and their limits, keys, errors, streams, the graceful stop."""
