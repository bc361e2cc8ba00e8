"""DeepSpeed's ZeRO as a backend: its configuration made from the run, its engine behind the protocol.

Read in this order: `library` imports it, `config` and `keys` say what an engine is started with, `backend` starts one
for each model, `model` is what the user calls, `gradients` how a backward is corrected and clipped, `prepared` steps,
`state` gathers what a checkpoint holds, `applied` reads back what is in force. `checks` and `elementwise` refuse what
ZeRO would train wrongly, `reached` gradients that it would mix, and `written` brings values written in place to the
fp32 masters.
"""
