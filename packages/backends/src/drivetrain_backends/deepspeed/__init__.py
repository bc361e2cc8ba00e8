"""DeepSpeed's ZeRO as a backend: its configuration is derived from the run, its engine implements the protocol.

Read in this order: `library` imports DeepSpeed; `config`, `keys` and `possible` make and check an engine's
configuration; `backend` starts an engine for each model; the user calls `model`; `engine_backward` runs backwards and
`gradients` corrects and clips gradients; `prepared` steps; `optimizer` wraps the user's optimizer; `state` and
`partitions` gather a checkpoint; `applied` reads back the values in force. `checks` and `elementwise` refuse what
ZeRO would train wrongly, `reached` refuses gradients that ZeRO would mix, and `written` copies values that a user
wrote in place to the fp32 masters.
"""
