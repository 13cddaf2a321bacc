import subprocess

import pytest

from benchmarks.peers import environments


@pytest.fixture
def commands(monkeypatch):
    run = []
    monkeypatch.setattr(
        environments.subprocess, "run", lambda command, check: run.append((command, check))
    )
    return run


def test_makes_an_environment_of_fixed_versions(tmp_path, commands):
    (tmp_path / "opacus").mkdir()
    assert not environments.is_complete(tmp_path, "opacus")
    environments.make(tmp_path, "opacus", "python3.11")
    assert commands[0] == (["python3.11", "-m", "venv", str(tmp_path / "opacus")], True)
    pip, check = commands[1]
    assert pip[0] == str(tmp_path / "opacus" / "bin" / "python")
    assert pip[-2:] == list(environments.REQUIREMENTS["opacus"])
    assert check
    assert environments.is_complete(tmp_path, "opacus")


def test_other_versions_are_not_complete(tmp_path):
    (tmp_path / "opacus").mkdir()
    (tmp_path / "opacus" / "requirements.txt").write_text("torch==1.0\nopacus==1.6.0\n")
    assert not environments.is_complete(tmp_path, "opacus")


def test_a_failed_installation_leaves_no_complete_environment(tmp_path, monkeypatch):
    def fail(command, check):
        if "pip" in command:
            raise subprocess.CalledProcessError(1, command)
        (tmp_path / "opacus").mkdir()

    monkeypatch.setattr(environments.subprocess, "run", fail)
    with pytest.raises(subprocess.CalledProcessError):
        environments.make(tmp_path, "opacus", "python3.11")
    assert not environments.is_complete(tmp_path, "opacus")


def test_command_line(tmp_path, commands, monkeypatch, capsys):
    for peer in environments.REQUIREMENTS:
        (tmp_path / peer).mkdir()

    def main(*arguments):
        commands.clear()
        monkeypatch.setattr("sys.argv", ["environments.py", f"--dir={tmp_path}", *arguments])
        environments.main()

    main("jax_privacy", "--python=python3.11")
    assert [command[0] for command, _ in commands][0] == "python3.11"
    assert environments.is_complete(tmp_path, "jax_privacy")
    main()
    made = {command[-1].split("/")[-1] for command, _ in commands if "venv" in command}
    assert made == {"tf_privacy", "opacus"}
    assert "jax_privacy is there already." in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main("fastdp")


def test_versions_are_fixed():
    for requirements in environments.REQUIREMENTS.values():
        assert all(requirement.count("==") == 1 for requirement in requirements)
