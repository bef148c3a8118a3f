"""Which addresses may be used, as written and as resolved."""

from __future__ import annotations

import ipaddress
from pathlib import Path

import pytest

from app.backends.reach import Address, OutOfReach, ReachPolicy, parse_address
from app.domain.errors import InvalidArgument


class TestAddresses:
    @pytest.mark.parametrize(
        ("text", "address"),
        [
            ("127.0.0.1:50051", Address(host="127.0.0.1", port=50051)),
            ("Engine-1.Example:1", Address(host="engine-1.example", port=1)),
            ("[::1]:65535", Address(host="::1", port=65535)),
            ("unix:/run/engines/e1.sock", Address(socket="/run/engines/e1.sock")),
        ],
    )
    def test_what_is_one(self, text: str, address: Address) -> None:
        assert parse_address(text) == address

    @pytest.mark.parametrize(
        "text",
        [
            "",
            "engine",
            ":50051",
            "engine:0",
            "engine:65536",
            "engine:-1",
            "engine:٣",
            "::1:50051",
            "[engine]:1",
            "[::1%lo]:1",
            "unix:relative.sock",
            "unix:/run/../etc/x",
            "unix:/run//x",
            "unix:/a\x00b",
            "dns:///engine:1",
            "http://engine:1",
            "user@engine:1",
            "engine/path:1",
            "2130706433:1",
            "0x7f.1:1",
            "127.1:1",
            "127.000.0.1:1",
            "-engine:1",
            "a" * 64 + ":1",
        ],
    )
    def test_what_is_none(self, text: str) -> None:
        with pytest.raises(InvalidArgument):
            parse_address(text)


class TestThePolicy:
    def test_nothing_is_allowed_that_is_not_named(self) -> None:
        for address in ("127.0.0.1:1", "localhost:1", "[::1]:1", "unix:/run/e.sock"):
            with pytest.raises(OutOfReach):
                ReachPolicy().check(address, encrypted=True)

    @pytest.mark.parametrize(
        ("address", "allowed"),
        [
            ("10.1.2.3:1", True),
            ("11.1.2.3:1", False),
            ("192.0.2.7:1", True),
            ("192.0.2.8:1", False),
            ("engine.example:1", True),
            ("ENGINE.example:1", True),
            ("other.example:1", False),
            ("a.pool.example:1", True),
            ("a.b.pool.example:1", True),
            ("pool.example:1", False),
            ("evilpool.example:1", False),
            ("169.254.169.254:1", False),
            ("0.0.0.0:1", False),
            ("[fd00::7]:1", True),
            ("[::ffff:10.1.2.3]:1", True),
            ("[::ffff:11.1.2.3]:1", False),
        ],
    )
    def test_an_address_is_judged_by_hosts_and_networks(self, address: str, allowed: bool) -> None:
        policy = ReachPolicy(
            hosts=("engine.example", "*.pool.example", "192.0.2.7"),
            cidrs=("10.0.0.0/8", "fd00::/8", "169.254.0.0/16", "0.0.0.0/8"),
        )
        if allowed:
            policy.check(address, encrypted=True)
        else:
            with pytest.raises(OutOfReach):
                policy.check(address, encrypted=True)

    @pytest.mark.parametrize(
        ("ip", "allowed"),
        [("10.1.2.3", True), ("127.0.0.1", False), ("::ffff:127.0.0.1", False), ("::1", False)],
    )
    def test_what_a_name_resolves_to_must_be_in_the_networks(self, ip: str, allowed: bool) -> None:
        policy = ReachPolicy(hosts=("engine.example",), cidrs=("10.0.0.0/8",))
        address = policy.check("engine.example:1", encrypted=True)
        if allowed:
            policy.check_ip(address, ipaddress.ip_address(ip), encrypted=True)
        else:
            with pytest.raises(OutOfReach):
                policy.check_ip(address, ipaddress.ip_address(ip), encrypted=True)

    @pytest.mark.parametrize("ip", ["169.254.169.254", "fe80::1", "224.0.0.1", "0.0.0.0", "::"])
    def test_without_networks_a_name_still_does_not_lead_everywhere(self, ip: str) -> None:
        policy = ReachPolicy(hosts=("engine.example",))
        address = policy.check("engine.example:1", encrypted=True)
        policy.check_ip(address, ipaddress.ip_address("203.0.113.5"), encrypted=True)
        with pytest.raises(OutOfReach):
            policy.check_ip(address, ipaddress.ip_address(ip), encrypted=True)

    def test_plaintext_stays_on_loopback(self) -> None:
        policy = ReachPolicy(
            hosts=("engine.example", "localhost"), cidrs=("10.0.0.0/8", "127.0.0.0/8", "::1/128")
        )
        for address in ("127.0.0.1:1", "[::1]:1", "localhost:1"):
            policy.check(address, encrypted=False)
        for address in ("10.0.0.1:1", "engine.example:1"):
            policy.check(address, encrypted=True)
            with pytest.raises(OutOfReach):
                policy.check(address, encrypted=False)
        # A name for this machine that turns out to be another one.
        local = policy.check("localhost:1", encrypted=False)
        with pytest.raises(OutOfReach):
            policy.check_ip(local, ipaddress.ip_address("10.0.0.1"), encrypted=False)

    def test_plaintext_beyond_it_needs_to_be_said(self) -> None:
        policy = ReachPolicy(cidrs=("10.0.0.0/8",), allow_plaintext_beyond_loopback=True)
        policy.check("10.0.0.1:1", encrypted=False)

    def test_sockets_are_judged_by_where_they_really_are(self, tmp_path: Path) -> None:
        folder, outside = tmp_path / "sockets", tmp_path / "outside"
        folder.mkdir()
        outside.mkdir()
        (folder / "link.sock").symlink_to(outside / "real.sock")
        (folder / "way").symlink_to(outside)
        policy = ReachPolicy(socket_dirs=(str(folder),))
        policy.check(f"unix:{folder}/e1.sock")
        for path in (
            folder,
            folder / "link.sock",
            folder / "way" / "e.sock",
            outside / "e.sock",
            tmp_path / "sockets-2" / "e.sock",
        ):
            with pytest.raises(OutOfReach):
                policy.check(f"unix:{path}")

    @pytest.mark.parametrize("wrong", [{"cidrs": ("10.0.0.1/8",)}, {"socket_dirs": ("relative",)}])
    def test_a_policy_that_is_none_is_refused_at_once(self, wrong: dict[str, tuple[str]]) -> None:
        with pytest.raises(ValueError, match=r"."):
            ReachPolicy(**wrong)  # type: ignore[arg-type]
