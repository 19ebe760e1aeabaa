"""Our own transport: TCP between nodes, shared memory inside one."""
