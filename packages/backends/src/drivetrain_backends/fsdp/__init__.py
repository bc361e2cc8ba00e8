"""Training by FSDP2: parameters, gradients and optimizer states sharded over ranks with torch's `fully_shard`.

Read in this order: `backend` composes the strategy; `plan` chooses mesh and dtypes without changing anything; `shard`
turns a model into shards, block by block; `gradients` corrects and measures what FSDP averages; `layout` saves, loads
and gathers. `sharded_run` holds what they share, `models` is what a sharded model is made of, `guards` refuses what
would give wrong results, `applied` reads back the values in force, and `compat` holds torch's private names.
"""
