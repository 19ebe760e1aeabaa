def tables(r):
    return []


def bars(r):
    return []


def write_docs(r):
    pass
