"""The real nginx in the foreground of a test, with all of its files in one folder."""

import shutil
from pathlib import Path

import pytest

from tests.processes.programs import Program, Swarm

NGINX = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin")

CONFIG = """
daemon off; master_process off; pid {folder}/nginx.pid; error_log {folder}/nginx.log;
events {{}}
http {{
  access_log off;
  client_body_temp_path {folder}/t; proxy_temp_path {folder}/t; fastcgi_temp_path {folder}/t;
  uwsgi_temp_path {folder}/t; scgi_temp_path {folder}/t;
  {servers}
}}
"""


def start_nginx(swarm: Swarm, folder: Path, servers: str) -> Program:
    """Start nginx with these `server` blocks; skip the test where nginx is not installed."""
    if NGINX is None:
        # The program is the operator's choice, so the tests ask for no more than what is here.
        pytest.skip("nginx is not installed here (Debian: apt-get install nginx-light)")
    file = folder / "nginx.conf"
    file.write_text(CONFIG.format(folder=folder, servers=servers))
    return swarm.start("nginx", NGINX, "-p", str(folder), "-c", str(file), "-e", f"{folder}/nginx.log")
