"""Where leases live: mechanism only, one file for each kind of store."""
