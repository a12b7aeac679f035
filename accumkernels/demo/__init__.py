"""`python -m accumkernels demo`: a small GPT trained on real text, three ways side by side.

`data` reads the text, `model` is the GPT, `methods` has the three training loops, `train` runs them in turn, `measure`
takes the numbers that training does not show, `display` shows progress, `report` writes the table and the JSON file,
`picture` draws the PNG, and `command` runs them all.
"""
