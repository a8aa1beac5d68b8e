"""Which tests a run takes, in runs of their own over three small tests."""

import pytest

pytest_plugins = ["pytester"]
TESTS = """
'''A file.

Slow because
it counts to three.
'''
import pytest

def test_quick(): pass

@pytest.mark.slow
@pytest.mark.parametrize("number", range(40))
def test_slow(number): pass

@pytest.mark.gpu
def test_gpu(): pass
"""


@pytest.fixture
def folder(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    monkeypatch.delenv("FORETOKEN_TEST_DEVICE", raising=False)
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    pytester.makeini("[pytest]\nmarkers =\n    slow\n    gpu")
    pytester.makeconftest(
        "from selection import add_option as pytest_addoption, select, summarize\n"
        "import selection\n"
        "selection._LONG_FILE_S = -1.0\n"
        "def pytest_collection_modifyitems(config, items): select(config, items)\n"
        "def pytest_terminal_summary(terminalreporter, config): summarize(terminalreporter, config.rootpath)\n"
    )
    pytester.makepyfile(test_some=TESTS)
    return pytester


def run(folder: pytest.Pytester, *arguments: str) -> pytest.RunResult:
    return folder.runpytest_inprocess("-p", "no:cacheprovider", *arguments)


def test_slow_tests_and_those_for_a_gpu_are_left_out(folder: pytest.Pytester) -> None:
    run(folder).assert_outcomes(passed=1, deselected=41)


def test_all_takes_every_slow_test(folder: pytest.Pytester) -> None:
    result = run(folder, "--slow", "all")
    result.assert_outcomes(passed=41, deselected=1)
    result.stdout.fnmatch_lines(["test_some.py 40"])


def test_a_gpu_test_runs_where_there_is_a_gpu(folder: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORETOKEN_TEST_DEVICE", "cuda")
    run(folder).assert_outcomes(passed=2, deselected=40)


def test_shares_take_every_slow_test_once(folder: pytest.Pytester) -> None:
    numbers = [run(folder, "--slow", f"{share}/4").parseoutcomes()["passed"] - 1 for share in range(4)]
    assert sum(numbers) == 40
    assert all(0 < number < 25 for number in numbers)


@pytest.mark.parametrize("value", ["some", "4/4", "-1/4", "1/0", "1/"])
def test_a_share_that_is_none_is_refused(folder: pytest.Pytester, value: str) -> None:
    result = run(folder, f"--slow={value}")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["*Expected no, all, or K/N with K < N*"])


def test_long_files_are_listed_with_their_reason(folder: pytest.Pytester) -> None:
    folder.makepyfile(test_other="def test_quick(): pass")
    lines = run(folder).stdout
    lines.fnmatch_lines(["*test_some.py: it counts to three"])
    lines.fnmatch_lines(["*test_other.py: gives no reason"])
