"""The gate in the test process: real messages and a real server, no worker processes."""
