"""Makes the server of a study from its `[server]` section."""

from tuner.config import ServerSection
from tuner.servers.tuned_server import TunedServer


def server_of(section: ServerSection) -> TunedServer:
    """The server of the section. Raises SpaceError if its profile is wrong."""
    if section.profile is not None:
        from tuner.servers.find_profile import find_profile
        from tuner.servers.profiled_server import ProfiledServer

        return ProfiledServer(section, find_profile(section.profile))
    from tuner.servers.tgi.tgi_server import TgiServer

    return TgiServer(section)
