"""All checks of one method file under one protocol."""

from nexttransformer.checking.behaviour import check_behaviour
from nexttransformer.checking.findings import PART_ERRORS, describe_crash
from nexttransformer.checking.structure import Report, count_method, measure_method
from nexttransformer.config import MethodConfig, expand
from nexttransformer.protocol import Protocol


def check_method(method: MethodConfig, protocol: Protocol) -> Report:
    """Sizes a method and runs every check, structural and behavioural.

    Raises:
        ConfigError: if the file asks for something that no part offers.
    """
    try:
        config = expand(method, protocol)
    except PART_ERRORS as error:
        finding = describe_crash(f"sizing the method under {protocol.id}", error)
        return Report(method.method, method.family, None, findings=[finding])
    report = measure_method(config, protocol)
    if report.budget is not None:
        report.findings += count_method(config)
        # A part that cannot run once needs no further passes to say so.
        if not any(finding.rule == "crash" for finding in report.findings):
            report.findings += check_behaviour(config)
    return report
