"""Several nodes on one machine: what the tests here and tools/benchmarks/cross_node/cross_node.py run on."""
