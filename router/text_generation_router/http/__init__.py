"""The HTTP half of the router without its routes: connections and their limits, keys, errors, streams, the graceful
stop.
"""
