"""DeepSpeed's ZeRO as a backend: its configuration is derived from the run, its engine implements the protocol.

Read in this order: `library` imports DeepSpeed; `config` makes an engine's configuration, and `config_checks` checks
it; `checks` and `elementwise` refuse what ZeRO would train wrongly; `backend` starts an engine for each model. The
user calls `model`; `engine_backward` runs backwards, `reduction_checks` refuses gradients that ZeRO would mix, and
`gradients` corrects and clips them; `prepared` steps. `master_weights` copies values that a user wrote in place,
`partitioned_parameter` guards the empty parameters of stage 3, and `state` reads and loads a checkpoint. `compat`
holds the private names of DeepSpeed.
"""
