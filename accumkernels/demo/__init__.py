"""`python -m accumkernels demo`: a small GPT trained on real text, three ways side by side.

`data` reads the text, `model` is the GPT, `methods` are the three training loops, `train` runs them in turn, `measure`
takes the numbers that training does not give, `display` shows progress, `report` makes the table and the JSON file,
`picture` the PNG, and `command` ties them up.
"""
