// The scenarios of scenarios.py: `dotnet interop.dll azure|lite SCENARIO...`; and `ledger`, for tests/sdk_ledger.
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
    default:
        throw new ArgumentException($"azure, lite or ledger, not {args[0]}");
}
