"""Replicas on the machines of a Ray cluster: `text-generation-launcher --ray`.

Three processes take part. The launcher keeps a *driver* (`driver.py`), the only process of ours that asks Ray for
anything; it may die or hang with Ray's head, and nothing ends with it. On each replica's machine Ray runs an *actor*
(`hosts.py`), which starts our ordinary launcher with `--engine-only` as its child (`machine.py`). The engine ends with
its actor: its requests go on elsewhere, and the next one reads the weights again. With --fronts-on-every-node, actors
run fronts in the same way (`fronts.py`). Between the three goes JSON (`values.py`), and nothing else."""
