"""`python -m accumkernels demo`: a small GPT trained on real text, three ways side by side.

`data` reads the text, `model` is the GPT, `train` has the three training loops and measurements, `report` writes the
table, the JSON file and the picture, and `command` runs them all.
"""
