"""A linter of training scripts: what hangs, or silently trains wrong, on several ranks.

Scripts are parsed, never imported or run. `reading` parses files, notebooks and modules; `flow` finds the statements
that only some ranks reach; each file of `rules` is one concern; each of `reporters` one output.
"""
