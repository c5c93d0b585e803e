// The scenarios of scenarios.py: `dotnet interop.dll azure|lite SCENARIO...`; `ledger`, for tests/sdk_ledger; and `waits`,
// for waits.py.
using Peeklock.Interop;
using Peeklock.Interop.Azure;
using Peeklock.Interop.Lite;

switch (args[0])
{
    case "azure":
        await AzureProgram.Run(args[1..]);
        break;
    case "lite":
        await LiteProgram.Run(args[1..]);
        break;
    case "ledger":
        await LedgerProgram.Run(args[1..]);
        break;
    case "waits":
        await Waits.Run();
        break;
    default:
        throw new ArgumentException($"azure, lite, ledger or waits, not {args[0]}");
}
