"""Each module is a program for torch and names nothing of farprop's; `python -m farprop.compat` runs it on farprop."""
