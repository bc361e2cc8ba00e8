"""Training by FSDP2: parameters, gradients and optimizer states divided over ranks with torch's `fully_shard`.

`mesh_plan` and `dtypes` decide without touching anything, as `blocks` does one level up; `materialise` and `placing`
bring a model into shards; `sharded_model` is what is known of it then; `gradients`, `norms` and `prepared` train it;
`block_order`, `misuse`, `optimizer_probe` and `refused_parameters` refuse what would be wrong; `parameter_hooks` and
`buffers` do as DDP does; `state` loads it; `applied` reads back what is in force; `backend` holds them together.
"""
