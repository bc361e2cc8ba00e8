"""Training by FSDP2: parameters, gradients and optimizer states sharded over ranks with torch's `fully_shard`.

`mesh_plan` and `dtypes` plan without changing anything, as does `modules.wrap_policy`; `meta_init`, `scratch` and
`shard` turn a model into shards, which `sharded_model` describes; `gradients`, `norms` and `prepared` train it;
`block_order`, `assignment_guard`, `misuse`, `optimizer_probe` and `refused_parameters` refuse what would give wrong
results; `parameter_hooks` and `buffers` make hooks and buffers behave as under DDP; `state` loads checkpoints;
`applied` reads back the values in force; `compat` holds torch's private names; `backend` connects these modules.
"""
