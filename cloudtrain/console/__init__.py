"""The console: what the terminal shows, for eyes, in the browser; NiceGUI and plotly, no server to run.

    server.py      the process: a port of this machine, the address with the token, the end
    security.py        who may speak with it: Host, Origin and token of every request and websocket; headers of every answer
    routes.py       the table of pages
    shell.py       what surrounds every page: header, theme, keys, errors
    history.py     questions to the store, asked off the event loop

Pages read the store; they write through Submitter and Run alone, as the command line does.
"""
