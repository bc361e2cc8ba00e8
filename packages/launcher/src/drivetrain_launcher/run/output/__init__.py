"""The output of several ranks as one view: whole lines, marked with their rank, around the bars of rank 0."""
