"""What only a machine with a GPU can check, in stages of under eight minutes: `make gpu-check STAGE=1`.

`stages` says what runs, `runner` runs it and loses nothing when it is cut, `archive` packs what came of it, `summary`
says what that means and what to do next. All is the standard library's: torch is asked in processes of its own.
"""
