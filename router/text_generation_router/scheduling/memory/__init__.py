"""Token memory: free slots, the prefix cache, and what each request holds of both."""
