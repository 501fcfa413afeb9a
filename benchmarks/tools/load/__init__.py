"""`mooncake-bench`: loads any OpenAI-compatible server, and reports what its clients would have seen.

`cli` reads the command line. `sources` and `prompts` make the load. `clients` starts the processes that send
the load, each with an event loop (`sending`) and connections (`client`). `measures` turns outcomes into
figures, `report` and `pictures` show them.
"""
