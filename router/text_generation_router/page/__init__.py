"""The page for browsers at `/`: a playground for prompts and chats.

Its files have no build step: what is in `static/` is what a browser gets. Begin with `routes.py`, then `static/app.js`.
"""
