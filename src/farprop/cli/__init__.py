"""The command ``farprop``. A module of commands has a function ``add`` that adds them to the parser."""
