"""Chat templates: found in a model's files, judged by what they may cost, and rendered here or in a child process.

Begin with `chat_template.py`.
"""
