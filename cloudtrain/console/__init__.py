"""The console: runs in the browser (NiceGUI and plotly), served by one local process.

    server.py      the process: port, address with the token, shutdown
    security.py    checks Host, Origin and token of every request and websocket; sets security headers
    routes.py      the table of pages
    shell.py       the frame of every page: header, theme, keyboard shortcuts, errors
    history.py     queries of the history, off the event loop

Pages read the store. They write only through Submitter and Run, as the command line does.
"""
