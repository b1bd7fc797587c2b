"""Replicas on the machines of a Ray cluster: `text-generation-launcher --ray`.

Three processes take part, and send each other JSON only (`values.py`). The launcher keeps a *driver* (`client.py`,
`driver.py`), the only process of ours that asks Ray for anything. On each replica's machine Ray runs an *actor*
(`hosts.py`), which starts our ordinary launcher with `--engine-only` as its child (`machine.py`). With
--fronts-on-every-node, actors run fronts in the same way (`fronts.py`).

What follows a loss:

- An actor, its machine or its engine is lost: the engine ends with its actor. Its streams go on elsewhere, as for any
  lost engine. The replica starts again after 1 to 30 s and reads its weights again (`ReplicaKeeper`).
- The driver or Ray's head is lost, or silent: engines go on at their last known addresses, and the next driver finds
  the actors by their names (`RayClient`).
- A start fails, or is ended: the driver drains all replicas and fronts of the server, and removes actors and placement
  groups within 30 s (`RayClient.clear`).

Imports the launcher's `commands.py`, `config.py`, `process.py`, `control_call.py` and errors, and the common package.
Ray itself is imported in `cluster.py` and `hosts.py` only. Begin with `replica.py`, the launcher's view, then
`keeping.py`, what is decided.
"""
