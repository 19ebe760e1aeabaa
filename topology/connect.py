"""`connect` makes a group's Communicator: chooses the backend and what carries its collectives."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from .comm.bootstrap import Bootstrap
from .comm.collectives import Alone, AloneGather, Blocking, Collective, Gather
from .comm.emulated import Emulated
from .comm.groups import CommOptions, Communicator, TorchGroups
from .comm.ledger import Ledger
from .comm.lines import Lines, PlanChannel, stamped
from .comm.pipeline import NEXT, PREVIOUS, RING, Pipeline, SocketBoundary
from .hardware.cpu_quota import usable_cpus
from .placement.layout import GroupLayout
from .placement.world import World
from .transport import transport
from .transport.mesh import BACK, PLAN, STAGE, Mesh, connect_lines, connect_mesh


def connect(
    bootstrap: Bootstrap,
    layout: GroupLayout,
    options: CommOptions | None = None,
    choose: Callable[[int], str] | None = None,
    stages: Sequence[GroupLayout] = (),
) -> Communicator:
    """This rank's Communicator. All ranks of the job call it at once with their own group's layout. `stages`: the
    groups of the pipeline that it is one of, in order; its first rank sends plans to all of them. `choose`: message
    bytes -> flat, exchange, two_level, one_shot, doubling or pipeline, for collective auto (to gloo and nccl all but
    two_level, and to nccl one_shot, is flat). Raises MeshError, RuntimeError or ValueError naming what does not fit."""
    options = options or CommOptions()
    rank = layout.ranks.index(bootstrap.rank)
    backend = options.backend
    if backend == "auto":
        backend = "native" if transport.available() else "gloo"
    native = backend == "native"
    # What nodes exchange of a chunk is a share of it: pieces as large as between two cost as few packets and wake-ups.
    share = min(len(layout.nodes), 8) if len(layout.nodes) > 2 else 1
    small, chunk = (options.small_bytes, options.chunk_bytes * share) if native else (4096, 4096)
    segment = transport.segment_bytes(layout.size, layout.per_node, small, chunk) if native else 4096
    staged = len(stages) > 1
    mesh = connect_mesh(
        bootstrap,
        layout,
        options.address,
        segment,
        options.secret,
        options.connect_timeout_s,
        not staged,
        options.ports,
    )
    ledger, pipeline = Ledger(), None
    closers: list[Callable[[], None]] = []
    if staged:
        plans, pipeline, lines = _join_stages(bootstrap, stages, options, ledger)
        closers.append(pipeline.close)
    else:
        plans = PlanChannel(rank, mesh.plan)
    closers.append(plans.close)
    groups, limits = TorchGroups(), list[Callable[[float], None]]()
    node_reduce: Collective | None = None
    node_gathers: Gather = AloneGather()
    by_size = _library_strategy(options, choose)
    try:
        if options.process_groups or backend in ("gloo", "nccl"):
            from .comm.torch_groups import make_torch_groups

            groups = make_torch_groups(bootstrap, layout, options, backend, by_size is not None, stages)
        made = _collectives(
            backend, bootstrap, layout, options, choose if native else by_size, mesh, (small, chunk), groups, ledger,
            closers, staged,
        )  # fmt: skip
        all_reduce, gathers, set_timeout = made
        if pipeline is not None and backend == "nccl":
            from .comm.nccl import NcclGather
            from .comm.nccl_boundary import NcclBoundary

            boundary = NcclBoundary(groups.subgroups["stages"], groups.tp, ledger, pipeline.peers[PREVIOUS])
            boundary.connect()
            if isinstance(gathers, NcclGather):
                gathers.wait_for(None, "the first message between stages")
                gathers.wait.late = boundary.late
            pipeline.boundary = boundary
        elif pipeline is not None:
            link = "net" if lines.leave_the_host else "node"
            pipeline.boundary = SocketBoundary(pipeline, lines, gathers, rank, layout.size, ledger, link)
        if options.emulation is not None:
            all_reduce = Emulated(all_reduce, options.emulation, ledger)
        if options.node_group:
            node_reduce, node_gathers = _node_collectives(
                bootstrap, layout, options, backend, groups, ledger, closers, limits
            )
        if not options.overlap:
            all_reduce = Blocking(all_reduce)
            node_reduce = node_reduce and Blocking(node_reduce)
    except BaseException:
        for close in closers:
            close()
        if backend != "nccl":
            groups.end()
        raise

    def set_timeouts(seconds: float) -> None:
        for limit in (set_timeout, *limits):
            limit(seconds)

    return Communicator(
        rank,
        layout,
        backend,
        all_reduce,
        gathers,
        plans,
        ledger,
        groups,
        closers,
        set_timeouts,
        pipeline,
        node_reduce,
        node_gathers,
    )


def _node_collectives(
    bootstrap: Bootstrap,
    layout: GroupLayout,
    options: CommOptions,
    backend: str,
    groups: TorchGroups,
    ledger: Ledger,
    closers: list[Callable[[], None]],
    limits: list[Callable[[float], None]],
) -> tuple[Collective, Gather]:
    """The all-reduce of the group's ranks on this node, and without NCCL their gather; adds to closers and limits what
    it needs of them."""
    if backend == "nccl":
        from .comm.nccl import nccl_collective

        inside = groups.subgroups.get("intra")
        reduce = Alone() if inside is None else nccl_collective(inside, ledger, "node", options.deterministic)
        return reduce, AloneGather()
    node = _join_node(bootstrap, layout, options, backend)
    if node is None:
        return Alone(), AloneGather()
    closers.insert(0, node.close)
    limits.append(node.set_timeout)
    ledger.add_source(lambda: node.entries("node"), node.records, node.place)
    inner = transport.NativeGather(node, layout.per_node)
    return transport.NativeCollective(node, _inside(options)), inner


def _join_node(
    bootstrap: Bootstrap, layout: GroupLayout, options: CommOptions, backend: str
) -> transport.Transport | None:
    """A second transport, among the ranks of this rank's node; None where it is alone there. All ranks of the job call
    it at once. Raises MeshError, or ValueError for a backend that has no such group."""
    if backend != "native" and layout.size > 1:
        raise ValueError(f"parallel.dense_path=node needs backend native or nccl, not {backend}: use auto, or whole")
    here = GroupLayout(tuple(node for node in layout.nodes if bootstrap.rank in node))
    segment = transport.segment_bytes(here.size, here.per_node, options.small_bytes, options.chunk_bytes)
    mesh = connect_mesh(
        bootstrap, here, options.address, segment, options.secret, options.connect_timeout_s, False, options.ports
    )
    if here.size == 1:
        mesh.close_data()
        return None
    small, chunk, spin = options.small_bytes, options.chunk_bytes, _spin(options, here)
    return transport.Transport(mesh, here, bootstrap.rank, small, chunk, spin, options.timeout_s)


def _inside(options: CommOptions) -> Callable[[int], str]:
    """The strategy inside a node: the same order of summation on every node."""
    small = "two_level" if options.deterministic else "exchange"
    return lambda size: "pipeline" if size > options.small_bytes else small


def _collectives(
    backend: str,
    bootstrap: Bootstrap,
    layout: GroupLayout,
    options: CommOptions,
    choose: Callable[[int], str] | None,
    mesh: Mesh,
    sizes: tuple[int, int],
    groups: TorchGroups,
    ledger: Ledger,
    closers: list[Callable[[], None]],
    staged: bool,
) -> tuple[Collective, Gather, Callable[[float], None]]:
    """All-reduce, gather and how their timeout is set; what ends them goes before the other `closers`. choose: of
    `connect` for native, else of _library_strategy. sizes: the transport's small_bytes and chunk_bytes."""
    # NOTE: a stage of one rank keeps NCCL, whose time limits the messages between stages need.
    if layout.size == 1 and not (staged and backend == "nccl"):
        mesh.close_data()
        return Alone(), AloneGather(), lambda seconds: None
    if options.collective == "one_shot" and backend != "nccl":
        raise ValueError("collective: one_shot is between GPUs of a node: use backend nccl, or collective auto")
    if backend == "native":
        core = transport.Transport(
            mesh,
            layout,
            bootstrap.rank,
            *sizes,
            _spin(options, layout),
            options.timeout_s,
            options.deterministic == "everywhere",
        )
        closers.insert(0, core.close)
        link = "net" if len(layout.nodes) > 1 else "node"
        ledger.add_source(lambda: core.entries(link), core.records, core.place)
        native = transport.NativeCollective(core, _strategy(options, layout, choose))
        return native, transport.NativeGather(core, layout.size), core.set_timeout
    mesh.close_data()
    from .comm.backends import other_backend

    all_reduce, gathers, set_timeout, end = other_backend(backend, bootstrap, layout, groups, options, ledger, choose)
    closers.insert(0, end)
    return all_reduce, gathers, set_timeout


def _join_stages(
    bootstrap: Bootstrap, stages: Sequence[GroupLayout], options: CommOptions, ledger: Ledger
) -> tuple[PlanChannel, Pipeline, Lines]:
    """Lines to the same rank of the stages before and after, between the last stage and the first, and of the whole
    pipeline's first rank to all others."""
    ranks, world = tuple(rank for stage in stages for rank in stage.ranks), World(stages[0].size, len(stages))
    me = ranks.index(bootstrap.rank)
    peers = dict(zip((NEXT, PREVIOUS, RING), world.passing(me), strict=True))
    channels = {NEXT: STAGE, PREVIOUS: STAGE, RING: BACK}
    to_connect = [(peer, channels[line]) for line, peer in peers.items() if peer is not None]
    to_connect += [(r, PLAN) for r in range(1, len(ranks))] if me == 0 else [(0, PLAN)]
    sockets_by_line = connect_lines(
        bootstrap, ranks, to_connect, options.address, options.secret, options.connect_timeout_s, options.ports
    )
    sockets = {line: sockets_by_line[peer, channels[line]] for line, peer in peers.items() if peer is not None}
    names = [-1 if (peer := peers[line]) is None else ranks[peer] for line in range(3)]
    for s in sockets.values():
        stamped(s)
    lines = Lines(sockets, lambda line: f"rank {names[line]} is gone (its connection ended)", "stage")
    plans = PlanChannel(me, tuple(sockets_by_line.get((r, PLAN)) for r in range(len(ranks))))
    return plans, Pipeline(world.stage_of(me), world.stages, names, lines, ledger), lines


def _spin(options: CommOptions, layout: GroupLayout) -> float:
    if options.spin_us is not None:
        return options.spin_us
    return 20.0 if layout.per_node * 2 <= usable_cpus() else 0.0


def _strategy(options: CommOptions, layout: GroupLayout, choose: Callable[[int], str] | None) -> Callable[[int], str]:
    """Message bytes -> the transport's strategy. Above small_bytes everything is the pipeline."""
    spans = len(layout.nodes) > 1 and layout.per_node > 1
    names = {name: name for name in ("exchange", "two_level", "doubling", "pipeline")} | {"flat": "exchange"}
    if options.collective == "doubling" and (layout.per_node > 1 or layout.size & (layout.size - 1)):
        raise ValueError(
            f"collective: doubling needs one rank on each of 2, 4, 8, … nodes, not {len(layout.nodes)} x "
            f"{layout.per_node}: use auto or two_level"
        )

    def strategy(size: int) -> str:
        if size > options.small_bytes:
            return "pipeline"
        if options.collective == "emulated":
            return "two_level" if options.deterministic is True else "exchange"
        if options.collective != "auto":
            return names[options.collective]
        if choose is not None:
            return names[choose(size)]
        # Whole vectors to everyone save a hop through a communication thread; node sums save per_node times the bytes.
        return "two_level" if spans and size * layout.per_node > (8 << 10) else "exchange"

    return strategy


def _library_strategy(options: CommOptions, choose: Callable[[int], str] | None) -> Callable[[int], str] | None:
    """Message bytes -> gloo's or NCCL's strategy; None where it is always their own."""
    if options.deterministic:
        return None
    if options.collective in ("two_level", "one_shot"):
        return lambda nbytes: options.collective
    return choose if options.collective == "auto" else None
