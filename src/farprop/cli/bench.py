def add(commands):
    pass
