"""LoRA adapters as PEFT writes them: which are served, what their files say, and whether they fit a model. Imports no
torch. Begin with `listed.py`.
"""
