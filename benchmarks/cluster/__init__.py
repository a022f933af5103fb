"""Training systems compared on one machine: hosts with limited network links, ranks with a virtual accelerator."""
