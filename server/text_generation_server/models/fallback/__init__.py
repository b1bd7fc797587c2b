"""Models of families that `families/` does not have: transformers computes them, over our cache and our attention.

The package is used for such models only, and it alone imports transformers while serving, within its functions.

    config.py  what the shard must know before it loads, and which models are refused
    calls.py   the attention function that transformers calls
    probe.py   what each layer asks of the attention, found in a trial before serving
    norms.py   our norms in the places of transformers'
    model.py   the `Model`
    load.py    makes the model of its weights files
"""
