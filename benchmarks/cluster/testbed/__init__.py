"""The machine as a cluster: hosts as network namespaces with shaped links, processes on them, their load."""
