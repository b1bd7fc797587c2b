"""Token memory: free slots, the prefix cache, and the slots and cached prefixes that each request holds."""
