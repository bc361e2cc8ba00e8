"""Prepare the objects of a program: loaders, models, optimizers and schedulers."""
