"""What knows text: prompts become token ids, tokens become text, chats become prompts, and grammars are checked.

Imports neither `http/` nor `api/`. Begin with `validation.py`, which makes a checked request of a prompt.
"""
