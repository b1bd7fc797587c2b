"""Models of families that `families/` does not have: transformers computes them, over our cache and our attention.

The package is used for such models only, and it alone imports transformers while serving, within its functions.

    config.py  what the shard must know before it loads, and which models are refused
    probe.py   the attention function that transformers calls, and what each layer asks of it, found in trials
    model.py   the `Model`
    load.py    makes the model of its weights files, with our norms in the places of transformers'
"""
