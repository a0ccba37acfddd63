"""The installers: their files, and install.sh at work."""
