"""What a micro-batch costs that passes the model in parts, and of how many samples parts are best."""
